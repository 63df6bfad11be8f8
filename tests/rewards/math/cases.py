"""The table of cases for the `math` rule: gold answers with right and wrong responses."""

# Each block is a gold answer, followed by right (+) and wrong (-) responses that are separated by ¦. A response without
# a box gets "Answer: " in front.
CASES = r"""
# integers
34
  + 34 ¦ $34$ ¦ 34. ¦ 34.0 ¦ 034 ¦ +34 ¦ \boxed{34} ¦ **34** ¦ \(34\) ¦ `34` ¦ $$34$$ ¦ (34)
  - 35 ¦ 3 ¦ -34 ¦ 340 ¦ 3.4 ¦ 33.999 ¦ - ¦ thirty
34
  + 34_{10} ¦ x = 34 ¦ $x=34$ ¦ m + n = 34 ¦ f(3) = 34 ¦ 17 \cdot 2 = 34 ¦ AB = 34 ¦ S_{10} = 34 ¦ the answer is 34
  + The final answer is: 34
  - 34 = x + 1 ¦ x + 34 ¦ 34x ¦ 34 = 35 ¦ 35 = 34 ¦ x = 35 ¦ 2x = 34 ¦ x + y - 34 = 0 ¦ x > 34 ¦ x \ne 34
34
  + 34 cm ¦ 34 \text{ cm} ¦ 34\,\text{cm}^2 ¦ \$34 ¦ $34 ¦ 34 dollars ¦ 34 apples ¦ 34 m ¦ 34^\circ ¦ 34° ¦ 34 degrees
  + 34 square units ¦ €34 ¦ 34\text{} ¦ 34 \mbox{ }
  - 34 x ¦ 34 thousand ¦ 34 million ¦ 34 squared ¦ 34 factorial ¦ 34! ¦ 34 halves ¦ 34i ¦ 34\pi ¦ 34e
34
  - 34, 35 ¦ \boxed{34, 35} ¦ 34 or 35 ¦ 34 and 35 ¦ 1 or 2 or 34 ¦ 34 35 ¦ 34; 35 ¦ \{34, 35\} ¦ (34, 35) ¦ [34, 35]
  - 30-40 ¦ 33-35 ¦ 34-35 ¦ 34/35 ¦ \pm 34 ¦ 34 \pm 0 ¦ 33 < x < 35 ¦ x \ge 34 ¦ [34, 34] ¦ 34 not 35
34
  - 17 \cdot 2 ¦ 17*2 ¦ 68/2 ¦ \frac{68}{2} ¦ 30+4 ¦ \sqrt{1156} ¦ \int_0^{34} 1 dx ¦ \sum_{i=1}^{34} 1 ¦ 34^1
  - \lim_{x \to 34} x ¦ \binom{34}{1} ¦ 34_8 ¦ What is 17*2?
34
  + \boldsymbol{34} ¦ \bm{34} ¦ {\bf 34} ¦ \mathbf{34} ¦ \color{blue}{34} ¦ \textcolor{red}{34} ¦ \underline{34}
  + \text{\textbf{34}} ¦ \text{34.}
  + 34\; ¦ 34\, ¦ 34 \quad \blacksquare ¦ 34 ✓ ¦ 34 ✅ ¦ = 34 ¦ \text{The answer is } 34 ¦ \text{Answer: } 34
  + \vec{v} = 34 ¦ \max f = 34 ¦ x_{\max} = 34 ¦ <answer>34</answer> ¦ 34</answer>
  - \boldsymbol{35} ¦ \text{35} = 34 ¦ \textbf{35 or 34} ¦ 34 \\ [-9, 9] ¦ 34\\[-9,9]
  - \text{Twice: } 34 ¦ \text{not: } 34 ¦ = 35
34
  + 34 °C ¦ 34^\circ\text{C} ¦ 34℃ ¦ 34°F ¦ 34 sq. cm ¦ 34 sq ft ¦ 34 L ¦ 34 more apples ¦ 34 fewer ¦ 34 times
  + It rang 34 times.
  - 34 more than 5 ¦ 34 less than x ¦ 34 times ten ¦ 34 times as many ¦ 34 more or less ¦ 3 times 34
-7
  + -7 ¦ −7 ¦ x = -7 ¦ $-7$ ¦ -7.0 ¦ - 7 ¦ minus seven ¦ negative seven
  - 7 ¦ --7 ¦ -\frac{7}{2} ¦ x-7 ¦ 0-7
0
  + 0 ¦ 0.0 ¦ 00 ¦ zero ¦ -0 ¦ x = 0
  - 1 ¦ O ¦ 0% ¦ 1-1 ¦ x + y = 0 + 0 = 1 ¦ x + y + 1 = 0 ¦ \emptyset
1034
  + 1034 ¦ 1,034 ¦ 1{,}034 ¦ 1,\!034 ¦ 1\,034 ¦ $1{,}034$ ¦ 1 034 ¦ 1034.00
  - (1,034) ¦ 1,34 ¦ 10,34 ¦ 1.034 ¦ 1;034 ¦ 1, 034 ¦ 034
1,000,000
  + 1000000 ¦ 1,000,000 ¦ 10^6 = 1000000 ¦ 1 million ¦ 1 \times 10^6 ¦ 1e6 ¦ 1.0 \times 10^{6}
  - 1,000 ¦ 100,000 ¦ 1,000,00 ¦ 1e5 ¦ 10^6
22500
  + x = 22,500 ¦ \boxed{x = 22{,}500} ¦ N = 22,\!500 ¦ 100 \times 225 = 22,500 ¦ 10,000 + 12,500 = 22,500
  + \approx 22,500 ¦ Total = $22,500 ¦ S = 22,500 square meters ¦ \text{Total cost: } \$22,500
  + \text{Cost} = \$22{,}500.00
  - x = 22,501 ¦ x = 22, 500 ¦ x = 22,50 ¦ x = 22,500, y = 3 ¦ 22,500, 22,501 ¦ (22,500) ¦ \{22,500\} ¦ x = 22,500 or 3
  - 10,000 + 12,501 = 22,500 ¦ x = 0,022,500
22, 500
  + 22,500 ¦ x = 22,500 ¦ x = 22, x = 500
123456789012345678901234567890
  + 123456789012345678901234567890 ¦ 123,456,789,012,345,678,901,234,567,890
  - 123456789012345678901234567891 ¦ 1.2345678901234568e29 ¦ 123456789012345680000000000000
6
  + six ¦ \text{six} ¦ Six ¦ 6
  - seven ¦ sixty ¦ sixth ¦ s*i*x
\mbox{four}
  + 4 ¦ four ¦ \text{four}
  - 5 ¦ five ¦ fo
21
  + twenty-one ¦ twenty one ¦ 21
  - twenty ¦ one ¦ twenty-two
# decimals
0.5
  + 0.5 ¦ .5 ¦ 1/2 ¦ \frac12 ¦ 0.50 ¦ ½ ¦ x = 0.5 ¦ 5e-1
  - 0.51 ¦ 5 ¦ 50\% ¦ 0,5 ¦ 0.05 ¦ 1-0.5
3.14
  + 3.14 ¦ 3.140 ¦ \frac{314}{100}
  - 3.1 ¦ \pi ¦ 3.141 ¦ 3 ¦ 3.14159
82.50
  + 82.5 ¦ \$82.50 ¦ 82.50
  - 82.05 ¦ 82 ¦ 8250
48.0
  + 48 ¦ 48.0 ¦ 48.00
  - 4.80 ¦ 480
2.3e5
  + 230000 ¦ 2.3 \times 10^5 ¦ 2.3\cdot10^{5} ¦ 230,000
  - 2.3 ¦ 23000 ¦ 2.3 \times 10^4
# fractions
\frac{3}{4}
  + \frac{3}{4} ¦ \dfrac{3}{4} ¦ \tfrac34 ¦ 3/4 ¦ \frac34 ¦ 0.75 ¦ \frac{6}{8} ¦ \frac{-3}{-4} ¦ $\frac{3}{4}$.
  + \left(\frac{3}{4}\right) ¦ p = \frac{3}{4}
  - \frac{4}{3} ¦ 4/3 ¦ 0.7 ¦ 75\% ¦ 3 ¦ \frac{3}{5} ¦ -\frac{3}{4} ¦ 1-\frac14 ¦ 3,4 ¦ 3:4
-\frac{1}{2}
  + -1/2 ¦ \frac{-1}{2} ¦ -\frac12 ¦ \frac{1}{-2} ¦ -0.5 ¦ -.5
  - 1/2 ¦ -2 ¦ \frac12
\frac{1}{3}
  + 1/3 ¦ 0.333333 ¦ 0.33333333 ¦ 0.\overline{3} ¦ \frac{2}{6}
  - 0.33 ¦ 0.3333 ¦ 0.333334 ¦ 0.3 ¦ 0.333343 ¦ 33.3333\% ¦ 3
\frac{1}{1048576}
  + 1/1048576 ¦ 0.00000095367431640625
  - 0.0 ¦ 0 ¦ 0.00000 ¦ 0.000001 ¦ 0.000000953674
1\frac{1}{2}
  + 1\frac{1}{2} ¦ 3/2 ¦ 1.5 ¦ 1 1/2 ¦ 1 \frac12 ¦ 1½
  - \frac{1}{2} ¦ 11/2 ¦ 1/2 ¦ 1, 1/2
-15\frac{3}{5}
  + -15.6 ¦ -\frac{78}{5} ¦ -15 \frac{3}{5}
  - 15.6 ¦ -14.4 ¦ -9
\frac{2469}{20,000}
  + 2469/20000 ¦ 0.12345
  - 2469/20
2\frac{1}{3}
  + 2.\overline{3} ¦ 2.\bar{3} ¦ 2.\overline3 ¦ 2.333333\ldots ¦ \mathbf{2\frac{1}{3}} ¦ \boldsymbol{\frac73}
  - 2.\bar{4} ¦ 2.333\ldots
# percents
50\%
  + 0.5 = 50\% ¦ \frac{1}{2} = 50\%
  - 0.4 = 50\% ¦ 50\% = 0.5 ¦ 5 = 50\%
50\%
  + 50\% ¦ 50% ¦ 50 percent ¦ 50 \text{ percent} ¦ 50 ¦ 50.0\%
  - 0.5 ¦ 5\% ¦ 50.5\% ¦ 1/2 ¦ 500\%
10
  + 10 ¦ 10% ¦ 10\% ¦ 10 percent ¦ 10.0\% ¦ x = 10\%
  - 0.1 ¦ 1000\% ¦ 0.1\% ¦ -10\% ¦ 11\%
\frac{7}{2}
  - \frac{7}{2}\%
-5
  - -5\%
5 \text{ dollars}
  - 5\%
0.1
  + 0.1 ¦ 1/10
  - 10\% ¦ 10 ¦ 0.1\%
33\frac{1}{3}\%
  + 33\frac13 \% ¦ \frac{100}{3}\% ¦ 100/3 %
  - 33\% ¦ \frac13 ¦ 33.3\%
0.56 = 56\%
  + 56\% ¦ 0.56 ¦ 56
  - 0.56\% ¦ 5.6\% ¦ 57\%
# units
34\text{ cm}
  + 34 ¦ 34 cm ¦ 34 centimeters ¦ 34\text{cm}
  - 34 m ¦ 34 inches ¦ 3.4 cm ¦ 35 cm
7 \text{ days}
  + 7 ¦ 7 days ¦ seven ¦ 7\text{ days}
  - 7 hours ¦ 8 days ¦ 7 weeks
2400 \mbox{ cm}^2
  + 2400 ¦ 2400 cm^2 ¦ 2400 \text{ square centimeters} ¦ 2,400 cm²
  - 2400 cm^3 ¦ 240 ¦ 2400 m^2
\$23.40
  + 23.4 ¦ \$23.40 ¦ $23.40 ¦ 23.40 dollars
  - 2340 ¦ 23.04 ¦ 23
12\sqrt{13}\text{ feet}
  + 12\sqrt{13} ¦ 12\sqrt{13} ft ¦ 12\sqrt{13} \text{ feet}
  - 12\sqrt{31} ¦ 12 ¦ 12\sqrt{13} \text{ inches}
5t
  + 5t ¦ 5 t ¦ t \cdot 5
  - 5 ¦ 5\text{ s} ¦ t ¦ 5s
8:34 \text{ p.m.}
  + 8:34 ¦ 8:34 p.m. ¦ 8\!:\!34 \text{ p.m.} ¦ 8:34 PM
  - 8:34 a.m. ¦ 8:35 ¦ 834 ¦ 20:34
3:5
  + 3:5 ¦ 3 : 5 ¦ $3:5$
  - 5:3 ¦ 3 ¦ 3:50
# degrees
45^\circ
  + 45^\circ ¦ 45° ¦ 45 ¦ 45 degrees ¦ 45^{\circ} ¦ \angle ABC = 45^\circ ¦ x = 45^\circ
  - 54^\circ ¦ \pi ¦ 45 cm ¦ 450
\frac{\pi}{4}
  + \frac{\pi}{4} ¦ \pi/4 ¦ π/4 ¦ 45^\circ ¦ 0.25\pi ¦ \frac14\pi ¦ 0.7853982
  - 45 ¦ \frac{\pi}{3} ¦ 44^\circ ¦ 0.785 ¦ \frac{4}{\pi} ¦ \pi
# intervals
[0,1)
  + [0,1) ¦ [0, 1) ¦ \left[0, 1\right) ¦ 0 \le x < 1 ¦ x \in [0,1) ¦ 1 > x \ge 0 ¦ 0 ≤ x < 1
  - (0,1) ¦ [0,1] ¦ (0,1] ¦ 0 < x < 1 ¦ [0,2) ¦ 0, 1 ¦ 0 ¦ [1,0)
0 \le x < 1
  + [0,1) ¦ 0\leq x<1 ¦ x \in [0, 1)
  - [0,1] ¦ 0 < x < 1 ¦ x < 1 ¦ 1 \le x < 2
(-\infty, 5)
  + (-\infty, 5) ¦ x < 5 ¦ (-\infty,5) ¦ 5 > x ¦ \left( -\infty, 5 \right)
  - (-\infty, 5] ¦ x \le 5 ¦ x > 5 ¦ (5, \infty) ¦ (\infty, 5) ¦ 5
(-\infty, 5)
  + \{x : x < 5\} ¦ \{ x \mid x < 5 \} ¦ \text{Domain: } (-\infty, 5)
  - \{x : x > 5\} ¦ \{x | x < 5 | x < 6\}
(-\infty, 2) \cup (3, \infty)
  + (-\infty, 2) U (3, \infty) ¦ x < 2 \lor x > 3 ¦ (-\infty, 2) \bigcup (3, \infty) ¦ \{x | x < 2 \text{ or } x > 3\}
  - x < 2 \land x > 3 ¦ (-\infty, 2) U (4, \infty)
(-\infty,5)\cup (5,\infty)
  + (5,\infty) \cup (-\infty,5) ¦ x \ne 5 ¦ x < 5 or x > 5 ¦ x \neq 5 ¦ (-∞,5)∪(5,∞)
  - (-\infty,\infty) ¦ x = 5 ¦ 5 ¦ (-\infty,5]\cup[5,\infty) ¦ (-\infty,5)
[3, 4) \cup \left(4, \frac{64}{11}\right]
  + [3,4)\cup(4,64/11] ¦ (4,\tfrac{64}{11}] \cup [3,4)
  - [3,4) ¦ [3,4]\cup(4,64/11] ¦ [3,64/11]
(-\infty,\infty)
  + \mathbb{R} ¦ (-\infty, \infty)
  - \infty ¦ (0,\infty) ¦ \mathbb{Q}
# sets and lists
\{4,5,7\}
  + \{4,5,7\} ¦ \{7, 5, 4\} ¦ 4, 5, 7 ¦ {4,5,7} ¦ \left\{5,4,7\right\}
  - \{4,5\} ¦ \{4,5,7,8\} ¦ 457 ¦ 4,5 ¦ (7,5,4) ¦ \{4,4,5,7\}
1, 2
  + 2, 1 ¦ 1,2 ¦ 1 and 2 ¦ 1 \text{ or } 2 ¦ \{1,2\} ¦ x = 1, x = 2 ¦ x = 1 or x = 2 ¦ 1; 2
  - 1 ¦ 2 ¦ 1, 2, 3 ¦ 1, 3 ¦ 12 ¦ [1,2] ¦ 1, 1
-12 \text{ or } -30
  + -30, -12 ¦ -12 and -30
  - -12 ¦ -30 ¦ 12, 30 ¦ -42
2, 3, \text{ and } 4
  + 4, 3, 2 ¦ 2, 3, and 4 ¦ 2,3,4
  - 2, 3 ¦ 2, 3, 5
100, 200
  + 100, 200 ¦ 100,200 ¦ 200, 100
  - 100200 ¦ 100
\pm 2
  + \pm 2 ¦ 2, -2 ¦ -2 and 2 ¦ ±2 ¦ \{-2, 2\} ¦ x = \pm 2
  - 2 ¦ -2 ¦ \pm 3 ¦ 2, 2 ¦ 0
1 \pm \sqrt{2}
  + 1+\sqrt{2}, 1-\sqrt{2} ¦ 1\pm\sqrt2 ¦ 1-\sqrt2 and \sqrt2 + 1
  - 1+\sqrt{2} ¦ -1 \pm \sqrt2 ¦ 1 \pm \sqrt{3}
# tuples
(1,2)
  + (1,2) ¦ (1, 2) ¦ \left(1,2\right) ¦ (x,y) = (1,2) ¦ 1, 2 ¦ (1.0, 2) ¦ x = 1, y = 2 ¦ \langle 1, 2 \rangle
  - (2,1) ¦ 2, 1 ¦ (1,2,3) ¦ [1,2] ¦ 1 ¦ (1,3) ¦ 12 ¦ y = 1, x = 2 ¦ (1,2), (3,4)
\left( -\frac{16}{5}, \frac{53}{10} \right)
  + (-16/5, 53/10) ¦ (-3.2, 5.3) ¦ \left(-\dfrac{16}{5}, \dfrac{53}{10}\right)
  - (16/5, 53/10) ¦ (-16/5, 53) ¦ (53/10, -16/5)
(-4, 27);(2, 15)
  + (2,15), (-4,27) ¦ (-4,27) and (2,15)
  - (-4,27) ¦ (27,-4),(2,15) ¦ (-4,27),(2,16)
\left( 2, \frac{11 \pi}{8} \right)
  + (2, 11\pi/8) ¦ (2, \frac{11\pi}{8})
  - (2, \frac{8\pi}{11}) ¦ (3, \frac{11\pi}{8}) ¦ \frac{11\pi}{8}
\left( 3, \frac{\pi}{2} \right)
  + r = 3, \theta = \frac{\pi}{2}
  - \theta = \frac{\pi}{2}, r = 3 ¦ \theta = 3, r = \frac{\pi}{2}
# matrices
\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix}
  + \begin{pmatrix}1&0\\0&3\end{pmatrix} ¦ \begin{bmatrix} 1 & 0 \\ 0 & 3 \end{bmatrix}
  + A = \begin{pmatrix} 1 & 0 \\ 0 & 3.0 \end{pmatrix} ¦ A^{-1} = \begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix}
  + \left(\begin{array}{cc} 1 & 0 \\ 0 & 3 \end{array}\right) ¦ \left[\begin{array}{cc}1&0\\0&3\end{array}\right]
  - \left|\begin{array}{cc} 1 & 0 \\ 0 & 3 \end{array}\right| ¦ \left(\begin{array}{c} 1 \\ 3 \end{array}\right)
  - \begin{pmatrix} 1 & 0 \\ 3 & 0 \end{pmatrix} ¦ \begin{pmatrix} 1 & 0 & 0 & 3 \end{pmatrix} ¦ 3
  - \begin{vmatrix} 1 & 0 \\ 0 & 3 \end{vmatrix} ¦ \begin{pmatrix} 1 \\ 3 \end{pmatrix}
\begin{pmatrix} 4/9 \\ 4/3 \end{pmatrix}
  + \begin{pmatrix} \frac{4}{9} \\[2pt] \frac{4}{3} \end{pmatrix}
  - \begin{pmatrix} 4/3 \\ 4/9 \end{pmatrix} ¦ \begin{pmatrix} 4/9 & 4/3 \end{pmatrix}
# words and choices
\text{Monday}
  + Monday ¦ monday ¦ \text{monday} ¦ \textbf{Monday} ¦ Monday. ¦ **Monday**
  - Tuesday ¦ yadnom ¦ Mon ¦ Monday or Tuesday ¦ not Monday ¦ M
\text{(A)}
  + (A) ¦ A ¦ \text{A} ¦ \textbf{(A)} ¦ a ¦ **A** ¦ (\text{A})
  - (B) ¦ B ¦ A, B ¦ A or B ¦ AB ¦ \text{(A) and (B)}
A
  + (A) ¦ A ¦ \mathrm{A}
  - B ¦ 1 ¦ AA ¦ A+1
\text{A, B}
  + A, B ¦ \text{A}, \text{B} ¦ B and A ¦ A,B
  - A ¦ B ¦ A, C ¦ AB
AB
  + AB ¦ \text{AB} ¦ \overline{AB} = AB
  - BA ¦ A ¦ A \cdot B
3x_2
  + 3x_2 ¦ 3x_{2}
  - 3x ¦ 3x_3 ¦ 3 ¦ 2x_3
\binom{n}{2}
  + \dbinom{n}{2} ¦ \tbinom{n}{2}
  - \dbinom{2}{n}
\text{Evelyn}
  + \text{Evelyn.} ¦ \texttt{Evelyn} ¦ \emph{Evelyn} ¦ \text{\textbf{Evelyn}} ¦ \text{The answer is Evelyn}
  - \text{not Evelyn}
\text{even}
  + even ¦ Even ¦ \text{even}
  - odd ¦ neither ¦ eve
east
  + East ¦ \text{east}
  - west ¦ seat ¦ eats
# equations
y = 2x - 13
  + y = 2x - 13 ¦ 2x - 13 ¦ y=2x-13 ¦ y = -13 + 2x ¦ 2x - y = 13 ¦ y - 2x + 13 = 0
  - y = 2x + 13 ¦ 2x ¦ x = 2y - 13 ¦ -13 ¦ 2x - y = 12 ¦ 0 = 0 ¦ y = y
2x+3
  + 2x+3 ¦ y = 2x+3 ¦ 3 + 2x ¦ f(x) = 2x+3 ¦ 2(x+1)+1
  - 2x ¦ 2x+4 ¦ 2x-3 ¦ 3x+2 ¦ 5 ¦ x
x + 2y - 2z - 9 = 0
  + x+2y-2z-9=0 ¦ 2x + 4y - 4z - 18 = 0 ¦ x + 2y = 2z + 9 ¦ -x-2y+2z+9=0
  - x+2y-2z+9=0 ¦ x+2y-2z-9 ¦ 0 ¦ x + 2y - 2z = 0 ¦ 0=0 ¦ x=x
x = 12
  + 12 ¦ x = 12 ¦ x=12.0 ¦ 12 = x
  - y = 12 ¦ x = 13 ¦ x ¦ 12x ¦ x = 12, y = 3 ¦ 24 = 2y
x \le y
  + y \ge x ¦ x \leq y ¦ 2x \le 2y
  - x < y ¦ x \ge y ¦ x = y
x^2+1=0
  + x^2 + 1 = 0 ¦ 2x^2+2=0
  - x^2+2=0 ¦ x^2-1=0 ¦ 0
# expressions
x+1
  + x+1 ¦ 1+x ¦ (x+1)
  - x ¦ x-1 ¦ x+2 ¦ y+1 ¦ 1 ¦ x1
(x+1)^2
  + x^2+2x+1 ¦ (x+1)^2 ¦ (1+x)(x+1) ¦ x**2+2*x+1
  - x^2+1 ¦ (x+1) ¦ x^2+2x ¦ (x-1)^2
2(x+1)
  + 2(x+1) ¦ 2x+2 ¦ 2(1+x)
  - 2x+1 ¦ 2, x+1 ¦ (2x+1)
\frac{1}{2x}
  + \frac{1}{2x} ¦ 1/(2x)
  - \frac{12}{x} ¦ \frac{1}{2}x ¦ 12x
1.5x
  + 1.5x ¦ \frac{3x}{2} ¦ \frac32 x
  - 15x ¦ 1 5x ¦ 1.5 ¦ 1,5x
2 \cdot 3^x
  + 2 \cdot 3^x ¦ 2(3^{x}) ¦ 3^x \cdot 2
  - 23^x ¦ 6^x ¦ 2 + 3^x
49x^2 - 42xy
  + 7x(7x-6y) ¦ 49x^{2}-42xy ¦ -42xy+49x^2
  - 49x^2 ¦ 49x^2+42xy
2\sqrt{3}
  + 2\sqrt{3} ¦ 2\sqrt3 ¦ \sqrt{12} ¦ 2 \cdot \sqrt{3} ¦ 2√3 ¦ 2*sqrt(3) ¦ 3.4641016
  - \sqrt{3} ¦ 2\sqrt{2} ¦ 3.46 ¦ 3\sqrt{2} ¦ 2, 3 ¦ 23 ¦ \sqrt{13}
\frac{1 + \sqrt{5}}{2}
  + \frac{1+\sqrt5}{2} ¦ (1+\sqrt{5})/2 ¦ \frac12 + \frac{\sqrt5}{2} ¦ 1.6180340
  - \frac{1-\sqrt5}{2} ¦ 1.618 ¦ \frac{1+\sqrt5}{3} ¦ \frac{1\pm\sqrt5}{2}
\frac{\sqrt{2}}{2}
  + \frac{1}{\sqrt2} ¦ \sqrt{2}/2 ¦ \sqrt{\frac12}
  - \sqrt2 ¦ \frac{2}{\sqrt{2}} ¦ 0.7
\sqrt[3]{5}
  + \sqrt[3]{5} ¦ 5^{1/3} ¦ 5^{\frac13}
  - \sqrt{5} ¦ \frac53 ¦ 5^3
10\pi
  + 10\pi ¦ 10 \pi ¦ \pi \cdot 10 ¦ 10π ¦ 10pi ¦ 31.415927
  - 10 ¦ \pi ¦ 31.4 ¦ 10 + \pi ¦ 100\pi
32\pi-64
  + 32(\pi-2) ¦ -64+32\pi
  - 32\pi+64 ¦ 32\pi
2^{10}
  + 1024 ¦ 2^{10} ¦ 4^5
  - 2^{11} ¦ 1023 ¦ 210 ¦ 20
\frac{1}{2^{98}}
  + 2^{-98} ¦ \frac{1}{2^{98}}
  - \frac{1}{2^{94}} ¦ 2^{-97} ¦ 0 ¦ 0.0 ¦ \frac{1}{2}
\log_2 3
  + \log_2 3 ¦ \log_{2}{3} ¦ \frac{\ln 3}{\ln 2}
  - \log_3 2 ¦ \ln 3 ¦ 1.58
e^2
  + e^2 ¦ e^{2} ¦ e \cdot e ¦ 7.3890561
  - 2e ¦ e ¦ 7.389
3+4i
  + 3+4i ¦ 4i+3 ¦ 3 + 4 i
  - 3-4i ¦ 4+3i ¦ 7 ¦ 5 ¦ 3, 4
1+2i
  + 1+2\mathrm{i} ¦ 1 + 2\text{i}
  - 1+2\text{j}
-i
  + -i ¦ - i
  - i ¦ 1 ¦ -1 ¦ -x
\sqrt{2}
  - \sqrt{2}! ¦ (\sqrt{2})!
n!
  + n!
  - n ¦ (n-1)! ¦ n+1
\frac{1}{x}
  + 1/x ¦ x^{-1} ¦ \frac1x
  - x ¦ -x ¦ \frac{2}{x}
\cos^2\alpha
  + \cos^2 \alpha ¦ 1-\sin^2\alpha ¦ (\cos \alpha)^2
  - \cos \alpha ¦ \sin^2 \alpha ¦ 1
# number bases
1010_2
  + 1010_2 ¦ 1010_{2} ¦ 1010 ¦ 1010_{\text{two}}
  + (1010)_2 ¦ 1010 base 2 ¦ 1010 (base 2) ¦ 1010\text{ (base 2)} ¦ \text{1010}_2 ¦ 1010 \text{ in base } 2
  - 1010 base 3 ¦ (1010)_3 ¦ 1011 base 2
  - 10 ¦ 1010_3 ¦ 1011_2 ¦ 1010_{10} ¦ 1010\%
10
  - 1010_2 ¦ 10_2 ¦ A_{16}
\text{A5}_{11}
  + A5_{11} ¦ \text{A5}_{11} ¦ A5
  - A6_{11} ¦ 115 ¦ A5_{12}
# units, currencies and multiples on both sides
$5
  + $5 ¦ \$5 ¦ 5 ¦ 5 dollars ¦ \$5.00 ¦ five dollars ¦ 5 USD
  - 5 cents ¦ 5 euros ¦ €5 ¦ 5€ ¦ 5¢ ¦ £5 ¦ 5 rupees ¦ 5 dozen dollars ¦ 5\% ¦ 5 dollars per hour
5 \text{ cents}
  + 5 ¦ 5¢ ¦ 5 cents each
  - $5 ¦ \$5 ¦ 5 dollars ¦ €5 ¦ 5 pounds
\$12 \text{ per hour}
  + 12 dollars per hour ¦ \$12/hour ¦ 12
  - 12 dollars per day ¦ 12 euros per hour
5
  - 5 dozens ¦ 5 dozen ¦ 5 billions ¦ 5 hundreds ¦ 5\text{ dozen} ¦ 5 sevenths ¦ 5 thirds ¦ 5 millionths ¦ five sevenths
  - 5 score ¦ 5 gross ¦ 5 lakh ¦ 5 mil ¦ 5k ¦ 5 out of ten ¦ 5 to one ¦ 5 to 1 ¦ 5:1 ¦ 5 : 1 ¦ 5 times ten ¦ 5 or more
5 \text{ dozens}
  + 60 ¦ 5 dozen ¦ 60 eggs ¦ five dozen eggs
  - 5 ¦ 5 eggs ¦ 12 ¦ 5 thousand
\frac{5}{7}
  + 5 sevenths ¦ five sevenths ¦ \frac{{5}}{{7}} ¦ \dfrac{{ 5 }}{7}
  - 5 ¦ 7 fifths ¦ 5 eighths ¦ 5:7
60 \text{ mph}
  + 60 miles per hour ¦ 60 mi/h ¦ 60
  - 60 km/h ¦ 60 miles ¦ 60 kilometers per hour ¦ 60 hours
12 \text{ apples}
  + 12 ¦ 12 apples ¦ 12 red apples ¦ 12 apples left
  - 12 oranges ¦ 12 cm ¦ 12 dozen apples
3:30
  + 3:30 ¦ 3 : 30 ¦ 3∶30
  - 0.1 ¦ 1/10 ¦ 3/30 ¦ 3 ¦ 330 ¦ 3.5
# equations
6
  + 6 = x ¦ x = 6 ¦ \theta = 6 ¦ 3! = 6 ¦ \frac{12}{2} = 6 ¦ \gcd(12, 18) = 6 ¦ \text{Area} = 6 ¦ [ABC] = 6 ¦ a_{10} = 6
  + x \approx 6 ¦ area = 6 ¦ 2 \cdot 3 = 6 = x
  - -x = 6 ¦ x! = 6 ¦ x!=6 ¦ x^2 = 6 ¦ x + 1 = 6 ¦ \sqrt{x} = 6 ¦ |x| = 6 ¦ \frac{1}{x} = 6 ¦ \sin x = 6
  - \frac{x}{2} = 6 ¦ xy = 6 ¦ n(n+1) = 6 ¦ x - y = 6 ¦ e^x = 6 ¦ \log_2 x = 6 ¦ x^{-1} = 6 ¦ 6 = x^2 ¦ 6 = -x
  - \lfloor x \rfloor = 6 ¦ 6 \approx 7 ¦ 7 \approx 6 ¦ 5.4 \approx 6 ¦ 2 \cdot 4 = 6 ¦ x = 5 = 6 ¦ x'' + x = 6
\frac{20}{3}
  + \frac{20}{3} \approx 6.67 ¦ x = \frac{20}{3} \approx 6.666 ¦ 20/3 \approx 6.7
  - \frac{20}{3} \approx 6.8 ¦ 6.67 \approx \frac{20}{3}
# floating-point forms
\frac{5}{6}
  + 0.8333333333333334 ¦ 0.8333333333333333 ¦ 0.83333333333333337
  - 0.8333333333333433 ¦ 0.83
0.3
  + 0.30000000000000004
  - 0.3000000000000004 ¦ 0.3000001
\sqrt{2}
  + 1.4142135623730951 ¦ 1.41421356237309504880
  - 1.4142135623731951 ¦ \frac{886731088897}{627013566048} ¦ \sqrt{2} + 10^{-60} ¦ \sqrt{2} + e^{-200} ¦ \cot 0
  - \tan 90°
7
  - 6.999999999999999 ¦ 7.000000000000001
# the empty set
\emptyset
  + \varnothing ¦ \{\} ¦ ∅ ¦ \text{the empty set} ¦ empty set ¦ $\emptyset$ ¦ \{ \} ¦ x \in \emptyset
  - 0 ¦ \{0\} ¦ \{\emptyset\} ¦ ()
# degrees and radians
60^\circ
  + \frac{\pi}{3} ¦ \frac{\pi}{3} \text{ radians} ¦ 60 degrees ¦ x = \frac{\pi}{3}
  - \frac{\pi}{4} ¦ 60 radians ¦ \frac{\pi}{3}^\circ ¦ 60 minutes
\frac{\pi}{3}
  + 60^\circ ¦ 60 degrees ¦ \frac{\pi}{3} rad
  - 60 ¦ 60 radians ¦ 61^\circ
2 \text{ radians}
  + 2 ¦ \frac{360}{\pi}^\circ ¦ 2 rad
  - 2^\circ
# characters
-7
  + ‐7 ¦ ‑7 ¦ –7 ¦ ﹣7 ¦ －7 ¦ x = ‑7
34
  + 3​4 ¦ ​34​ ¦ ﻿34 ¦ 3‍4 ¦ 3­4 ¦ ３４ ¦ x⁠ = 34
# sentences
34
  + She has 34 apples left. ¦ There are 34 students in the class. ¦ The total cost is $34.
  + So the area is $34$ square units. ¦ They need 34 buses, which is the answer. ¦ The number of ways is 34.
  + It takes 34 minutes
  - She has fewer than 34 apples. ¦ She does not have 34 apples. ¦ There are 34 or 35 apples. ¦ Is it 34?
  - It is about 34. ¦ She has 34 dozen apples. ¦ She has 34 percent of them. ¦ Twice 34 is the answer.
  - He has half of 34.
  - It isn't 34. ¦ At least 34 apples ¦ From 3 to 34. ¦ It is 34 squared. ¦ The square root of 34
  - The sum of 30 and 4 ¦ On October 3 at 34
34 \text{ km}
  + The distance is 34 km.
  - The distance is 34 miles. ¦ It takes 34 hours.
\frac{1}{2}
  + The probability is \frac{1}{2}. ¦ The probability is 1/2
# more expressions
|x-5|
  + |5-x| ¦ \sqrt{(x-5)^2} ¦ \left|x-5\right|
  - x-5 ¦ 5-x ¦ |x| - 5
x
  - \sqrt{x^2} ¦ |x| ¦ x + 10^{-20} \cdot 10^{-20} \cdot 10^{-20} ¦ x + \cosh 99 - \sinh 99 ¦ x + 0^x
\frac{n(n+1)}{2}
  + \binom{n+1}{2} ¦ n(n+1)/2 ¦ \frac{(n+1)!}{2(n-1)!}
  - \binom{n}{2} ¦ \frac{n!}{2}
\sin^2 x
  + \frac{1-\cos 2x}{2} ¦ \sin(x)^2 ¦ 1 - \cos^2 x
  - \sin x^2 ¦ \sin 2x ¦ \sin^{-1} x
\arctan 2
  + \tan^{-1} 2 ¦ \arctan(2)
  - \tan 2 ¦ \frac{1}{\tan 2}
2\pi
  - \pi/2 ¦ 1/2\pi
# too large to compare
9
  - 9^{9^{9^9}} ¦ 9^9^9^9 ¦ 9!!! ¦ (9!)! ¦ \binom{1000000}{500000}
x+y+z
  - (x+y+z)^{5000} ¦ 9^{9^{9^9}}x ¦ (x+y+z)^{99999999999} ¦ 100000!x ¦ \exp(\exp(\exp(\exp(9))))
"""
TOO_BIG = [
    ("9", "9" * 5000),
    ("9", "9+" * 400 + "9"),
    ("x+y+z", ",".join(map(str, range(5000)))),
    ("x+y+z", "(" * 400 + "5" + ")" * 400),
    ("34", "So the" * 150 + " area is $ ≈ 5"),  # no pattern may try every way to split a text
    ("34", "the area " * 100 + "$ = 5"),
    ("34", "5" + " apples" * 130 + " $"),
    ("34", "She has" * 130 + " 5 $"),
    ("34", "\\text{a} " * 100 + "$ = 5"),
]


def read_cases(sign):
    gold = ""
    for line in CASES.strip().splitlines():
        if line.startswith(f"  {sign} "):
            yield from ((gold, response) for response in line[4:].split(" ¦ "))
        elif not line.startswith(("#", " ")):
            gold = line


RIGHT, WRONG = list(read_cases("+")), list(read_cases("-"))
