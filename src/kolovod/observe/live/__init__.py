"""A running job seen from outside: what each rank shows, and what others make of it."""
