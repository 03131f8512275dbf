"""How the cost model is fitted to measured times, and judged on problems that the fit did not see."""
