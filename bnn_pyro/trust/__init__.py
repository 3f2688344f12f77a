"""The former name of ``checks``, for notebook 03 until it is executed again."""
