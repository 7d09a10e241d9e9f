"""What a model attends to, what its layers predict, what its parts do: arrays with labels, and no HTML."""
