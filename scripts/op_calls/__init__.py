"""Calls of the op drawn at random over all of its arguments, each judged by the formula in float64."""
