"""Tables that codes look up: optimal for a known density (`lloyd_max`) or for samples (`kmeans`)."""
