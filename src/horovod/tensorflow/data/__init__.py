"""Data prepared by processes of their own."""
