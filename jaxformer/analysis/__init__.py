"""What a model attends to, what its layers predict and its parts do, as arrays; nothing here draws or writes files."""
