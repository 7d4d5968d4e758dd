"""Jobs whose processes a scheduler of others hands out one by one: Ray's actors, Spark's tasks."""
