"""Whether what training follows is what it should be: objectives, gradients, and their estimators."""
