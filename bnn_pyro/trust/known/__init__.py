"""Reference posteriors that come with the package, and how far a method is from them."""
