"""What HMC, NUTS and ChEES are made of: transitions, adaptation, chains in processes or all at once, their records."""
