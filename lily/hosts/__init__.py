"""Hosts: what opens a device, owns buffers, loads kernels and runs plans."""
