"""Views of a running job: where its ranks are, and what they did last."""

from __future__ import annotations
