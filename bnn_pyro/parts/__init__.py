"""What variants are made of: nets, priors, likelihoods and guides; small functions, nothing to inherit."""
