"""Which kernel for which problem: the list, climbs by the cost model, and how lists are measured, made and judged."""
