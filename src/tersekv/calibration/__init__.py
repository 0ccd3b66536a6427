"""Everything that happens before a run: calibrations, profiles, and checks of keys."""
