"""Parts of the frameworks that Kolovod uses and their documentation does not promise.

One module a framework. Each name says what stands in for it where a version lacks it.
``tests/frontends/*/test_*_private_apis.py`` tell which version has broken which.
"""
