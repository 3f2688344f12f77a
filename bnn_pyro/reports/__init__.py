"""HTML pages and tables of results."""
