"""What a job tells about itself: where its ranks are, and what they did last."""

from __future__ import annotations
