"""What samplers of whole data sets follow: the log joint in flat coordinates, compiled, and whitened."""
