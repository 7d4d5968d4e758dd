"""Authenticated and encrypted connections, messages on them, and addresses. Knows no ranks."""
