"""The exchange of gradients: what all front ends agree upon, send and check alike."""
