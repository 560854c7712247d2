"""The methods of the papers, compared with each other by counts of tokens and passes."""
