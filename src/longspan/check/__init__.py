"""Compare a prepared model with the plain one: loss, every gradient, leaks between documents, evaluation."""
