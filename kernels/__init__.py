"""Kernel sources as package data: the headers that plugins compile against, and the sources themselves to read."""
