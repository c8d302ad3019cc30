"""Where longspan meets other libraries; the only folder that imports them."""
