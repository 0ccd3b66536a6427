"""A codec for files: bases over several layers, uniform steps and entropy coding."""
