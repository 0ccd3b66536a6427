"""Does a model still work with a packed cache: tasks, one file each in `tasks/`, run side by side by `harness`."""
