"""Thousands of short coding prompts to train the demo's drafters on, none of them a task of `builtin:coding-10`.

Two kinds: a few hundred tasks times phrasings times requests (`composed_prompts`), and prompts that the target writes
itself when it is given the first words of a user's turn (`OPENINGS`; `first_sentences` trims them).
"""

from __future__ import annotations

import random
import re

# What the tasks of builtin:coding-10 are about; a prompt that touches it is not trained on.
HELD_OUT = re.compile(
    r"fizz|buzz|binary.?search|linked.?list|\blru\b|least recently|word.?(count|frequenc)"
    r"|(count|frequenc)\w* of .*\bword"
    r"|how (often|many times) .*\bword|interval|transpos|bracket|parenthes|\bsieve|eratosthenes|\bprimes?\b|\bcsv\b",
    re.IGNORECASE,
)

OPENINGS = (
    "Write a Python function that",
    "Write a Python function to",
    "Write a Python function `",
    "Write a Python program that",
    "Write a short Python script that",
    "Write Python code to",
    "Create a Python function that",
    "Implement a Python function that",
    "Implement a Python class",
    "Define a Python class",
    "Using Python,",
    "How can I use Python to",
)

# signature: what the function does, in the third person
TASKS = """
add(a, b): returns the sum of two numbers
subtract(a, b): returns the difference of two numbers
multiply(a, b): returns the product of two numbers
safe_divide(a, b): divides two numbers and returns None when the divisor is zero
power(base, exponent): raises a number to an integer power without using the ** operator
absolute(x): returns the absolute value of a number
clamp(x, low, high): limits a number to the range between low and high
sign(x): returns -1, 0 or 1 depending on the sign of a number
average(numbers): returns the mean of a list of numbers
median(numbers): returns the median of a list of numbers
mode(values): returns the most common value of a list
variance(numbers): computes the variance of a list of numbers
standard_deviation(numbers): computes the standard deviation of a list of numbers
weighted_average(values, weights): computes a weighted average
largest(numbers): returns the largest number of a list without using max
smallest(numbers): returns the smallest number of a list without using min
second_largest(numbers): finds the second largest number of a list
running_total(numbers): returns a list of running totals
product(numbers): multiplies all numbers of a list
range_sum(a, b): adds all integers from a to b
sum_of_squares(n): returns the sum of the squares of the first n integers
factorial(n): computes the factorial of n with a loop
factorial_recursive(n): computes the factorial of n recursively
fibonacci(n): returns the n-th Fibonacci number
fibonacci_list(n): returns a list of the first n Fibonacci numbers
tribonacci(n): returns the n-th Tribonacci number
is_even(n): checks whether a number is even
is_odd(n): checks whether a number is odd
is_perfect_square(n): checks whether a number is a perfect square
is_power_of_two(n): checks whether a number is a power of two
is_leap_year(year): checks whether a year is a leap year
is_armstrong(n): checks whether a number is an Armstrong number
is_perfect(n): checks whether a number equals the sum of its divisors
divisors(n): returns all divisors of a number
gcd(a, b): computes the greatest common divisor of two integers
lcm(a, b): computes the least common multiple of two integers
digit_sum(n): adds the digits of a number
count_digits(n): counts the digits of a number
reverse_number(n): reverses the digits of an integer
is_palindrome_number(n): checks whether an integer reads the same backwards
to_binary(n): converts an integer to a binary string
from_binary(text): converts a binary string to an integer
to_hex(n): converts an integer to a hexadecimal string
to_roman(n): converts an integer to a Roman numeral
from_roman(text): converts a Roman numeral to an integer
collatz(n): returns the Collatz sequence that starts at n
square_root(x): approximates the square root of a number with Newton's method
cube_root(x): approximates the cube root of a number
round_to(x, places): rounds a number to some decimal places
percentage(part, whole): returns what percentage one number is of another
compound_interest(principal, rate, years): computes compound interest
simple_interest(principal, rate, years): computes simple interest
celsius_to_fahrenheit(c): converts a temperature from Celsius to Fahrenheit
fahrenheit_to_celsius(f): converts a temperature from Fahrenheit to Celsius
km_to_miles(km): converts kilometres to miles
seconds_to_time(seconds): converts seconds to hours, minutes and seconds
bmi(weight, height): computes the body mass index
circle_area(radius): returns the area of a circle
circle_circumference(radius): returns the circumference of a circle
rectangle_area(width, height): returns the area of a rectangle
triangle_area(a, b, c): computes the area of a triangle from its sides
sphere_volume(radius): returns the volume of a sphere
cylinder_volume(radius, height): returns the volume of a cylinder
distance(p, q): returns the distance between two points
hypotenuse(a, b): returns the length of the hypotenuse of a right triangle
slope(p, q): returns the slope of the line through two points
quadratic_roots(a, b, c): returns the roots of a quadratic equation
is_triangle(a, b, c): checks whether three lengths can form a triangle
reverse_string(text): returns a string backwards
is_palindrome(text): checks whether a string is a palindrome
count_vowels(text): counts the vowels of a string
count_consonants(text): counts the consonants of a string
remove_vowels(text): removes all vowels from a string
capitalize_words(text): capitalizes the first letter of every word
to_snake_case(text): converts a camel case name to snake case
to_camel_case(text): converts a snake case name to camel case
title_case(text): converts a string to title case
swap_case(text): swaps upper and lower case letters
remove_spaces(text): removes all spaces from a string
remove_punctuation(text): removes the punctuation from a string
remove_duplicates_string(text): removes repeated characters from a string
is_anagram(a, b): checks whether two strings are anagrams
is_pangram(text): checks whether a sentence uses every letter of the alphabet
longest_string(strings): returns the longest string of a list
shortest_string(strings): returns the shortest string of a list
join_strings(strings, separator): joins a list of strings with a separator
split_lines(text): splits a text into lines and strips each of them
starts_with(text, prefix): checks whether a string starts with a prefix
replace_all(text, old, new): replaces every occurrence of a substring
find_substring(text, part): returns the index of the first occurrence of a substring
truncate(text, length): shortens a string and adds an ellipsis
pad_left(text, width): pads a string on the left with spaces
center_text(text, width): centers a string within a given width
repeat(text, n): repeats a string n times
caesar_cipher(text, shift): encrypts a string with the Caesar cipher
caesar_decrypt(text, shift): decrypts a string that was encrypted with the Caesar cipher
rot13(text): applies the ROT13 cipher to a string
run_length_encode(text): compresses a string with run-length encoding
run_length_decode(text): decodes a run-length encoded string
hamming_distance(a, b): counts the positions at which two strings differ
edit_distance(a, b): computes the Levenshtein distance of two strings
longest_common_prefix(strings): finds the longest common prefix of a list of strings
longest_common_subsequence(a, b): returns the longest common subsequence of two strings
first_unique_char(text): returns the first character that occurs only once
reverse_words(text): reverses the order of the words of a sentence
acronym(text): builds an acronym from the first letters of a phrase
is_valid_email(text): checks whether a string looks like an email address
is_valid_phone(text): checks whether a string is a valid phone number
is_strong_password(text): checks whether a password is strong
random_password(length): generates a random password
is_numeric(text): checks whether a string holds only digits
extract_numbers(text): returns all numbers found in a string
extract_emails(text): returns all email addresses found in a text
char_to_ascii(text): returns the ASCII codes of the characters of a string
morse_encode(text): translates a string into Morse code
pig_latin(word): translates a word into Pig Latin
pluralize(word): returns the plural of an English word
slugify(text): turns a title into a URL slug
wrap_text(text, width): wraps a text to lines of a given width
remove_duplicates(items): removes duplicates from a list and keeps the order
flatten(items): flattens a nested list
chunk(items, size): splits a list into chunks of a given size
rotate(items, k): rotates a list to the right by k steps
interleave(a, b): interleaves two lists
zip_lists(a, b): combines two lists into a list of pairs
unique(items): returns the unique elements of a list
intersection(a, b): returns the common elements of two lists
union(a, b): returns the union of two lists
difference(a, b): returns the elements of one list that are not in another
symmetric_difference(a, b): returns the elements that are in exactly one of two lists
partition(items, predicate): splits a list in two by a predicate
filter_even(numbers): returns only the even numbers of a list
filter_positive(numbers): returns only the positive numbers of a list
square_all(numbers): returns the squares of the numbers of a list
double_all(numbers): doubles every number of a list
count_if(items, predicate): counts the elements that satisfy a predicate
index_of(items, value): returns the index of a value in a list or -1
last_index(items, value): returns the last index of a value in a list
move_zeros(numbers): moves all zeros of a list to the end
pairs_with_sum(numbers, target): finds all pairs of numbers that add up to a target
two_sum(numbers, target): returns the indices of two numbers that add up to a target
three_sum(numbers): finds all triples that add up to zero
max_subarray(numbers): finds the largest sum of a contiguous subarray
missing_number(numbers): finds the missing number of a list from 0 to n
find_duplicates(items): returns the elements that occur more than once
majority_element(items): returns the element that occurs in more than half of a list
is_sorted(items): checks whether a list is sorted
bubble_sort(numbers): sorts a list with bubble sort
insertion_sort(numbers): sorts a list with insertion sort
selection_sort(numbers): sorts a list with selection sort
merge_sort(numbers): sorts a list with merge sort
quick_sort(numbers): sorts a list with quicksort
heap_sort(numbers): sorts a list with heapsort
counting_sort(numbers): sorts non-negative integers with counting sort
sort_by_length(strings): sorts strings by their length
sort_by_key(records, key): sorts a list of dictionaries by a key
sort_descending(numbers): sorts a list in descending order
linear_search(items, value): searches a list from the front for a value
top_k(numbers, k): returns the k largest numbers of a list
kth_smallest(numbers, k): returns the k-th smallest number of a list
shuffle(items): shuffles a list in place
random_choice(items): picks a random element of a list
permutations(items): returns all permutations of a list
combinations(items, k): returns all combinations of k elements
power_set(items): returns all subsets of a set
cartesian_product(a, b): returns all pairs of elements of two lists
sliding_window_max(numbers, k): returns the maximum of every window of k numbers
moving_average(numbers, k): computes the moving average of a list
cumulative_product(numbers): returns the cumulative products of a list
differences(numbers): returns the differences between consecutive numbers
group_by_length(strings): groups strings by their length in a dictionary
group_by(items, key): groups the elements of a list by a key function
invert_dict(d): swaps the keys and values of a dictionary
merge_dicts(a, b): merges two dictionaries and adds values of common keys
filter_dict(d, predicate): keeps only the entries of a dictionary that satisfy a predicate
sort_dict(d): sorts a dictionary by its values
deep_get(d, path): looks up a nested key of a dictionary
flatten_dict(d): flattens a nested dictionary with dotted keys
max_value_key(d): returns the key with the largest value of a dictionary
dict_to_list(d): converts a dictionary to a list of tuples
list_to_dict(pairs): builds a dictionary from a list of pairs
inventory_total(items): computes the total value of an inventory dictionary
grade(score): converts a score to a letter grade
classify_age(age): classifies an age as child, teenager, adult or senior
day_name(n): returns the name of the n-th day of the week
month_days(month, year): returns the number of days of a month
days_between(a, b): returns the number of days between two dates
add_days(date, n): adds n days to a date
is_weekend(date): checks whether a date falls on a weekend
age_from_birthday(birthday): computes someone's age from a birthday
format_date(date): formats a date as day, month and year
parse_time(text): parses a time such as 12:30 into hours and minutes
current_time(): prints the current date and time
read_file(path): reads a text file and returns its content
write_file(path, text): writes a string to a file
append_line(path, line): appends a line to a file
count_lines(path): counts the lines of a file
copy_file(source, target): copies a file
file_exists(path): checks whether a file exists
list_files(folder): lists all files of a folder
file_extension(path): returns the extension of a file name
read_json(path): reads a JSON file
write_json(path, data): writes a dictionary to a JSON file
parse_config(text): parses lines of key=value into a dictionary
tail(path, n): returns the last n lines of a file
find_in_file(path, word): prints the lines of a file that contain a word
rename_files(folder, prefix): adds a prefix to the names of all files of a folder
file_size(path): returns the size of a file in kilobytes
matrix_add(a, b): adds two matrices
matrix_multiply(a, b): multiplies two matrices
identity_matrix(n): returns the n by n identity matrix
matrix_diagonal(m): returns the diagonal of a square matrix
matrix_trace(m): computes the trace of a square matrix
determinant(m): computes the determinant of a 2 by 2 matrix
rotate_matrix(m): rotates a square matrix by 90 degrees
spiral_order(m): returns the elements of a matrix in spiral order
row_sums(m): returns the sum of each row of a matrix
dot_product(a, b): computes the dot product of two vectors
vector_length(v): computes the length of a vector
normalize(v): scales a vector to length one
pascal_triangle(n): returns the first n rows of Pascal's triangle
multiplication_table(n): prints the multiplication table of n
print_pyramid(n): prints a pyramid of stars
print_square(n): prints a square of stars
checkerboard(n): prints a checkerboard of n by n cells
guess_number(): plays a number guessing game with the user
rock_paper_scissors(): plays rock, paper, scissors against the computer
roll_dice(n): rolls n dice and returns the total
coin_flips(n): simulates n coin flips and counts the heads
tic_tac_toe_winner(board): returns the winner of a tic-tac-toe board
hangman(word): plays a game of hangman
calculator(a, operator, b): applies +, -, * or / to two numbers
evaluate_postfix(expression): evaluates an expression in postfix notation
countdown(n): prints the numbers from n down to 1
print_evens(n): prints all even numbers up to n
print_list(items): prints each element of a list with its index
hello(name): greets a person by name
ask_number(): asks the user for a number until a valid one is entered
climb_stairs(n): counts the ways to climb n stairs with steps of one or two
coin_change(coins, amount): returns the smallest number of coins for an amount
knapsack(weights, values, capacity): solves the knapsack problem with dynamic programming
longest_increasing_subsequence(numbers): finds the length of the longest increasing subsequence
min_path_sum(grid): finds the smallest path sum in a grid
unique_paths(rows, columns): counts the paths through a grid
house_robber(values): computes the largest sum without adjacent elements
max_profit(prices): finds the best profit from buying and selling once
hanoi(n, source, target, spare): solves the Towers of Hanoi
n_queens(n): counts the solutions of the n queens problem
flood_fill(grid, row, column, color): fills a region of a grid with a color
count_islands(grid): counts the islands of a grid
bfs(graph, start): visits a graph in breadth-first order
dfs(graph, start): visits a graph in depth-first order
has_path(graph, a, b): checks whether two nodes of a graph are connected
shortest_path(graph, a, b): finds the shortest path between two nodes of a graph
dijkstra(graph, start): computes shortest distances with Dijkstra's algorithm
topological_sort(graph): sorts the nodes of a directed graph topologically
has_cycle(graph): checks whether a directed graph has a cycle
tree_height(root): computes the height of a binary tree
tree_sum(root): adds all values of a binary tree
inorder(root): returns the values of a binary tree in order
preorder(root): returns the values of a binary tree in preorder
level_order(root): returns the values of a binary tree level by level
is_symmetric(root): checks whether a binary tree is symmetric
count_leaves(root): counts the leaves of a binary tree
mirror_tree(root): mirrors a binary tree
tree_insert(root, value): inserts a value into a search tree
timer(function): measures how long a function takes, as a decorator
memoize(function): caches the results of a function, as a decorator
retry(function, times): calls a function again when it fails
compose(f, g): returns the composition of two functions
apply_n(f, n, x): applies a function n times to a value
map_values(f, d): applies a function to every value of a dictionary
reduce_list(f, items): combines the elements of a list with a function
take(n, iterable): returns the first n elements of an iterable
squares(): yields the square numbers as a generator
fibonacci_generator(): yields the Fibonacci numbers as a generator
random_numbers(n): returns a list of n random integers
parse_url(url): splits a URL into its parts
query_string(params): builds a query string from a dictionary
rgb_to_hex(r, g, b): converts an RGB color to a hex string
hex_to_rgb(text): converts a hex color to RGB values
is_valid_ip(text): checks whether a string is a valid IPv4 address
luhn_check(number): validates a credit card number with the Luhn algorithm
tax(income): computes an income tax with brackets
tip(bill, percent): computes the tip of a restaurant bill
discount(price, percent): returns a price after a discount
split_bill(total, people): splits a bill evenly between people
shopping_total(prices): adds the prices of a shopping cart with tax
convert_currency(amount, rate): converts an amount of money with an exchange rate
""".strip().splitlines()

CLASSES = """
Stack: a stack with push, pop and peek
Queue: a queue with enqueue and dequeue
Deque: a double-ended queue
PriorityQueue: a priority queue
LinkedList: a singly linked list with append and print
DoublyLinkedList: a doubly linked list
SearchTree: a search tree with insert and find
Graph: a graph with adjacency lists
Trie: a trie with insert and search
MinHeap: a min heap
HashMap: a simple hash map
Matrix: a matrix with addition
Vector: a two-dimensional vector with addition
Point: a point with a distance method
Rectangle: a rectangle with area and perimeter
Circle: a circle with area and circumference
Fraction: a fraction with addition and multiplication
Counter: a counter that can be increased and reset
BankAccount: a bank account with deposit and withdraw
Person: a person with a name and an age
Student: a student with a list of grades
Employee: an employee with a salary and a raise method
Car: a car with a speed and an accelerate method
Dog: a dog that can bark
Animal: an animal with subclasses for a cat and a dog
Shape: a shape with subclasses for a circle and a square
Library: a library of books that can be lent
Book: a book with a title, an author and a price
Inventory: an inventory of products
ShoppingCart: a shopping cart with a total
TodoList: a to-do list with add, remove and complete
Timer: a timer with start and stop
Logger: a logger that writes to a file
Config: a configuration with defaults
Temperature: a temperature in Celsius and Fahrenheit
Date: a date that can be compared
Playlist: a playlist of songs
Deck: a deck of cards with shuffle and deal
Die: a die with any number of sides
Game: a turn-based game with a score
Robot: a robot that moves on a grid
Elevator: an elevator with floors
ParkingLot: a parking lot with free spaces
Polynomial: a polynomial that can be evaluated
Set: a set built on a list
RingBuffer: a ring buffer of fixed size
EventEmitter: an event emitter with on and emit
Singleton: a singleton
Observer: the observer pattern
Calculator: a calculator with a history
""".strip().splitlines()

FUNCTION_PHRASES = (
    "Write a Python function `{signature}` that {does}.",
    "Write a Python function `{signature}` that {does}.",
    "Write a function `{signature}` in Python that {does}.",
    "Implement the Python function `{signature}`. It {does}.",
    "Write a Python function that {does}.",
    "Create a Python function called `{name}` that {does}.",
    "How can I write a Python function that {does}?",
    "Give me Python code for a function `{name}` that {does}.",
    "Please write a Python program with a function that {does}.",
    "Complete this Python function, which {does}:\n```python\ndef {signature}:\n```",
    "Write a {language} function that {does}.",
)
CLASS_PHRASES = (
    "Write a Python class `{name}`: {does}.",
    "Implement {does} in Python, as a class `{name}`.",
    "Create a Python class for {does}.",
    "Write a {language} class for {does}.",
    "Show me how to write {does} in Python.",
)
REQUESTS = (
    "",
    "",
    " Include a short example.",
    " Include an example call.",
    " Add a docstring.",
    " Use type hints.",
    " Explain briefly how it works.",
    " Explain the code step by step.",
    " Handle empty input.",
    " Add comments.",
    " Keep it short.",
    " Also write two assertions that test it.",
    " Do not use any library.",
    " What is its time complexity?",
)
LANGUAGES = ("JavaScript", "Java", "C", "C++", "Go", "TypeScript", "Ruby", "Rust")


def composed_prompts(n: int, seed: int) -> list[str]:
    """n distinct prompts, the same for the same seed; about one in ten asks for another language than Python."""
    draw = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < n:
        tasks, phrases = (CLASSES, CLASS_PHRASES) if draw.random() < 0.15 else (TASKS, FUNCTION_PHRASES)
        signature, does = draw.choice(tasks).split(": ", 1)
        text = draw.choice(phrases).format(
            signature=signature, name=signature.split("(")[0], does=does, language=draw.choice(LANGUAGES)
        )
        text += draw.choice(REQUESTS)
        if not HELD_OUT.search(text):
            prompts[text] = None
    return list(prompts)


def first_sentences(text: str, ended: bool) -> str | None:
    """The whole sentences of a prompt's first line, or None when there is none fit to train on.

    ended: whether the writer ended the turn itself rather than running into a length limit.
    """
    line, newline, _ = text.partition("\n")
    line = line.strip()
    if not ended and not newline:
        line = line[: max(line.rfind(end) for end in (". ", "? ")) + 1]
    fit = len(line.split()) >= 6 and line.isascii() and line[-1:] in (".", "?") and not HELD_OUT.search(line)
    return line if fit else None
