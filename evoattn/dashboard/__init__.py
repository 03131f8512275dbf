"""A study in optuna-dashboard, which follows a search that is running."""
