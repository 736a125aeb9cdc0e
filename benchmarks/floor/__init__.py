"""The floor: bare pipelines that make the same calls and commits as the product, with no logic."""
