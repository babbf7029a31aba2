"""From logits to tokens: noise, filters, draws and the rejection rule."""
