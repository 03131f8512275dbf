"""Which kernel for which problem: the shipped table, the rule that chooses from it, and how both are made."""
