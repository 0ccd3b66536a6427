"""Pictures from a model's own keys and from records: kinds, one file each in `kinds/`, drawn by `style.render`."""
