"""Attention softmax(q·K̂ᵀ)·V̂ over the segments of a store, merged by log-sum-exp."""
