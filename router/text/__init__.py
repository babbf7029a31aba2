"""Text and tokens: tokenizers, templates, stop strings, tool calls, and grammars tried in a process apart."""
