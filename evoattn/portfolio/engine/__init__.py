"""The engine that searches many problems at once, one process per GPU: campaigns, checks of regret and `tune` run on
it."""
