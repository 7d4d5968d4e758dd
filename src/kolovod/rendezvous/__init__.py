"""The meeting in which ranks become a world: they learn who they are, and get what they share."""
