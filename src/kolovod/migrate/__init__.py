"""Makes a training script distributed: what to change in it, and why. Needs LibCST.

``proposal.propose`` reads a script without running it. What it does not understand it leaves as it
is, and says so.
"""
