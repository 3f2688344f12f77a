"""What the commands do: a recipe, a run's folder, and one module or a few for each command."""
