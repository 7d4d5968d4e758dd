"""Horovod's second implementation of elastic jobs in Ray; here there is one."""

from horovod.ray.elastic import RayHostDiscovery, TestDiscovery

__all__ = ["RayHostDiscovery", "TestDiscovery"]
