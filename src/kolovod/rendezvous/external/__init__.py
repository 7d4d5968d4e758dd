"""Ranks that a launcher of somebody else has started, and how they find each other."""
