"""Whether the transitions of samplers leave the right distribution as it is, and at which order they fail to."""
