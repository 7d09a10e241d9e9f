"""What a model attends to, what its layers predict, what its parts do, as arrays; nothing here draws or writes files."""
