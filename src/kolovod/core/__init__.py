"""The core that all front ends share: requests to the engine, handles, the world, process sets."""
