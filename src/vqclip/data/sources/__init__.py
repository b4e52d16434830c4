"""Sources of samples: one file for each kind, with its config class, and a line in `kinds`."""
