"""How ranks meet and become a world: who they are, and what they share."""
