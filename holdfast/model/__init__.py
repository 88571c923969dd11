"""The nouns that cross borders: frozen structs, no behaviour beyond reading themselves."""
