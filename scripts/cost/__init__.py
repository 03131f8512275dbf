"""The cost model's data, fit and judgement."""
