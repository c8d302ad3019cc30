"""Recurrent token mixers over sequences divided over ranks, exact forward and backward: the gated delta rule."""
