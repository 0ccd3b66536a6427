"""Base classes that several codecs share."""
