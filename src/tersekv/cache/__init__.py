"""Stores: the packed key-value cache of each layer."""
