"""Where arrays lie. The only place that names mesh axes."""
