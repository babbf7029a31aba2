"""The engine on a GPU: its steps beside reading the weights, whether they are exact, and transformers."""
