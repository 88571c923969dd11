"""How a rank begins: forked from a zygote or executed, with the release's imports and the store."""
